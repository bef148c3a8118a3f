// A certified OpenID provider by another author, set up as an operator of Chadburn would set up
// theirs: one resource for administration, one for inference, one whose tokens are opaque.
//
// Prints one JSON line {issuer} once it answers. ADMIN_SCOPES, ADMIN, INFERENCE, OPAQUE and
// SECRET come from the environment. `rotate` on standard input puts a new key before the others
// and prints {kid}; `client {...}` registers a client and prints {client_id}; SIGTERM or the end of
// standard input ends it. Access tokens of clients whose id begins with `brief` last 20 seconds.

import { createServer } from 'node:http';
import { createInterface } from 'node:readline';
import { generateKeyPair, exportJWK } from 'jose';
import { Provider, errors } from 'oidc-provider';

const { ADMIN, INFERENCE, OPAQUE, ADMIN_SCOPES, SECRET } = process.env;

const resources = {
  [ADMIN]: { scope: ADMIN_SCOPES, audience: ADMIN, accessTokenFormat: 'jwt', jwt: { sign: { alg: 'RS256' } } },
  [INFERENCE]: { scope: 'inference:generate', audience: INFERENCE, accessTokenFormat: 'jwt', jwt: { sign: { alg: 'ES256' } } },
  [OPAQUE]: { scope: ADMIN_SCOPES, audience: OPAQUE, accessTokenFormat: 'opaque' },
};

async function signingKey(alg, name = 'provider') {
  const { privateKey } = await generateKeyPair(alg, { extractable: true });
  return { ...(await exportJWK(privateKey)), alg, use: 'sig', kid: `${name}-${alg}` };
}

const configuration = {
  jwks: { keys: [await signingKey('RS256'), await signingKey('ES256')] },
  clients: [
    {
      client_id: 'pipeline',
      client_secret: SECRET,
      grant_types: ['client_credentials'],
      response_types: [],
      redirect_uris: [],
    },
    {
      client_id: 'console',
      token_endpoint_auth_method: 'none',
      grant_types: ['authorization_code', 'refresh_token'],
      response_types: ['code'],
      redirect_uris: ['http://127.0.0.1/callback'],
      application_type: 'native',
    },
    {
      client_id: 'chadburn',
      client_name: 'The chadburn command line',
      token_endpoint_auth_method: 'none',
      grant_types: ['urn:ietf:params:oauth:grant-type:device_code', 'refresh_token'],
      response_types: [],
      redirect_uris: [],
      application_type: 'native',
    },
    {
      // The gateway itself, to ask about tokens; it gets none.
      client_id: 'gateway',
      client_secret: SECRET,
      grant_types: [],
      response_types: [],
      redirect_uris: [],
    },
  ],
  cookies: { keys: [SECRET] },
  features: {
    devInteractions: { enabled: true },
    clientCredentials: { enabled: true },
    deviceFlow: { enabled: true },
    backchannelLogout: { enabled: true },
    dPoP: { enabled: true },
    introspection: {
      enabled: true,
      allowedPolicy: (_, client) => client.clientId === 'gateway',
    },
    revocation: { enabled: true },
    resourceIndicators: {
      enabled: true,
      defaultResource: () => ADMIN,
      useGrantedResource: () => true,
      getResourceServerInfo(_, resource) {
        if (!(resource in resources)) throw new errors.InvalidTarget();
        return resources[resource];
      },
    },
  },
  pkce: { required: () => true },
  rotateRefreshToken: true,
  ttl: { AccessToken: (_, token, client) => (client.clientId.startsWith('brief') ? 20 : 3600) },
  // Its own would not go to loopback, where the gateways of tests are.
  fetch: (url, { dispatcher, ...options }) => fetch(url, options),
  scopes: ['openid', 'offline_access'],
  findAccount: (_, id) => ({ accountId: id, claims: () => ({ sub: id }) }),
};

// Another provider with the same storage takes the place of the one before, as a restart with a
// new key would.
let answer;
function serve(issuer) {
  answer = new Provider(issuer, configuration).callback();
}

const server = createServer((request, response) => answer(request, response));
server.listen(0, '127.0.0.1', () => {
  const issuer = `http://127.0.0.1:${server.address().port}`;
  serve(issuer);
  process.stdout.write(`${JSON.stringify({ issuer })}\n`);
  createInterface({ input: process.stdin })
    .on('line', async (line) => {
      if (line.startsWith('client ')) {
        const client = JSON.parse(line.slice('client '.length));
        const others = configuration.clients.filter((one) => one.client_id !== client.client_id);
        configuration.clients = [...others, client];
        serve(issuer);
        process.stdout.write(`${JSON.stringify({ client_id: client.client_id })}\n`);
        return;
      }
      const key = await signingKey('RS256', `rotated-${configuration.jwks.keys.length}`);
      configuration.jwks = { keys: [key, ...configuration.jwks.keys] };
      serve(issuer);
      process.stdout.write(`${JSON.stringify({ kid: key.kid })}\n`);
    })
    .on('close', () => process.exit(0));
});

process.on('SIGTERM', () => process.exit(0));
